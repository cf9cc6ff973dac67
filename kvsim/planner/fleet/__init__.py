"""The cheapest fleet for a trace: demand, offers, the programme, and its proof by simulation."""
