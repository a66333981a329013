"""Who holds a row: randomised answers, periods, fixed groups, bounds on what they reveal."""
