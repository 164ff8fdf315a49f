from model.convert import main

raise SystemExit(main())
