from model.serve import main

raise SystemExit(main())
