# A regular package, so that no module named `train` further down sys.path replaces it.
