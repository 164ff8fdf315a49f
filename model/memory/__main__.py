from model.memory.baselines import main

raise SystemExit(main())
