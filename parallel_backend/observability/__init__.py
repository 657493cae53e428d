"""All that people see while it runs: metrics, panel, toasts, logs, gauges, and the preview of a plan."""
