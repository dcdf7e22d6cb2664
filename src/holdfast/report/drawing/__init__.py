"""How pictures are drawn: charts and heat maps as data, and as SVG, HTML and PNG."""
