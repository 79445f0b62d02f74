"""The report on runs: one HTML file that needs no network. `page.build` makes it."""
