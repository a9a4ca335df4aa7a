"""Analysis of compiled GPU kernels' machine code (SASS), and the budgets that they must meet."""
