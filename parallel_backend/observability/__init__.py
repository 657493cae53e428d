"""Shows people what happens: metrics, panel, toasts, logs, gauges, and the preview of a plan."""
