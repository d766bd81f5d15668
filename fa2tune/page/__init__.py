"""One self-contained HTML page on a cache file, the searches behind it, or both: what won, by how much, and why.

``sources`` reads files, ``facts`` reckons with rows, ``svg`` draws marks, ``charts`` and ``searches`` whole drawings, and
``page`` puts it all into the template. Nothing asks for anything from elsewhere: styles, scripts and drawings are inline.
"""
