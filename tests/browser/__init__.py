"""The dashboard in Chromium. A package, because its tests share fixtures of that scope."""
