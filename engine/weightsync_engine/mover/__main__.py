from weightsync_engine.mover.process import main

raise SystemExit(main())
