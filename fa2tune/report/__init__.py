"""The HTML page of ``fa2tune report``.

``sources`` reads files; ``facts``, ``searches``, ``served`` and ``compared`` compute; ``charts`` and ``searchcharts`` make
Vega-Lite specifications with Altair; ``contents`` gathers what the template shows, and ``document`` writes the HTML. Styles,
scripts, the chart library and all data are inline, and a content security policy allows no request.
"""
