from model.memory.baselines import main

if __name__ == "__main__":
    raise SystemExit(main())
