"""One file per command of `dex`: the functions that the command line and `import dex` offer."""
