"""The page about runs: one HTML file, charts and text."""
