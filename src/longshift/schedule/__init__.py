"""Event lists and token orders, walked by the runtime and by the simulator. Imports no torch."""
