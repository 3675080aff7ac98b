"""What `dex push` is made of: one file per question that is asked before anything is uploaded, then the upload.

folder.py       which files of the folder are published: a whole model, and nothing else that lies there
paths.py        whether records name paths of the machine
account.py      whose the token is, and in whose names its user may make a repository
repository.py   what is in the repository now
difference.py   what is to be uploaded, and what of an earlier push is to go
upload.py       large files first, then one commit
download.py     the commit, fetched again and compared
words.py        what a person reads where the Hub says no
"""
