from model.sae import main

raise SystemExit(main())
