from model.classifier import main

raise SystemExit(main())
