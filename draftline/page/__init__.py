"""The frame of every page that Draftline writes: one self-contained HTML file, readable on a phone, light and dark.

    chart.py      ChartCurve, Chart, Bars: values in, positions of lines, bars and ticks out; long ones with few points
    frame.py      render(template, ...): Jinja2, with everything inlined and a policy that forbids every request
    templates/    base.html (frame), parts.html (charts, tables, notes as macros), page.css, page.js, one file per page

A page of its own extends the base and draws with the macros:

    {% extends "base.html" %}
    {% import "parts.html" as parts %}
    {% block lead %}<p>one line under the title</p>{% endblock %}
    {% block content %}
      {% call parts.section("curves", "Curves") %}
        <div class="charts">{{ parts.chart(loss) }}{{ parts.chart(accuracy) }}</div>
        {{ parts.table("Held-out figures", ["step", "loss"], rows) }}
      {% endcall %}
    {% endblock %}

    from draftline.page.chart import Chart, ChartCurve
    from draftline.page.frame import render
    html = render("compare.html", title="A against B", sections=[("curves", "Curves")], loss=Chart(...), ...)

`sections` fill the row of links at the top: the ids and headings that the page gives to `parts.section`. Whatever the
page shows is escaped. Colours come from the style sheet by name, so that both schemes stay readable: `hue(i)` for
things that differ in kind (i = 0..7), `shade(share)` for an order, such as slots. A `ChartCurve` with `noisy` is drawn
thin with its running mean, one with `band` has an interval around it, `marks` puts a dot at each value; a long curve is
drawn with few points by `thin`, and the chart says so itself. `Bars` has groups of bars over named categories.
"""
