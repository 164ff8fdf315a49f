from model.autoencoder import main

raise SystemExit(main())
