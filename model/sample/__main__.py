from model.sample import main

raise SystemExit(main())
