# A regular package, so that no module named `model` further down sys.path replaces it.
