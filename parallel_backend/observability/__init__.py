"""All that people see: metrics, panel, toasts, event log, gauges, and the commands `doctor` and `bench`."""
