from weightsync_engine.agent.process import main

raise SystemExit(main())
