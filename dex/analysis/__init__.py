"""`dex analyze`: what a model's heads, λ and attention do, in numbers (report.json) and on one page (report.html).

Each kind of question is a section in a file of its own, which takes a `Subject` and returns `Findings`:

    attention     what is linear in the maps, and their entropy: no map is formed
    maps          what needs the maps: a block of queries at a time
    branch        Dex: λ(t), what the branch does to O, and how W_O changed
    redundancy    how alike the heads of a layer are
    importance    how much the loss depends on each head
    outliers      the largest logits and hidden states
    quantised     what logits of 8, 6 and 4 bits cost
    landscape     the Hessian's eigenvalues
    example       who attends to the answer, token by token
"""
