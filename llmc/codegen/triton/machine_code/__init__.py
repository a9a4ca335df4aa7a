"""What compiled GPU kernels look like in machine code (SASS), and the budgets that they are held to."""
