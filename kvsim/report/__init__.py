"""Results of commands: on the terminal, as JSON, as HTML pages and as data frames.

A command's file (``predict``, ``plan``, ``capacity`` ...) makes one
:class:`~kvsim.report.result.Result` of what was computed. It holds the answer in words
(``answer``), rows under contract names (``json``), tables whose columns name a value of a row and
how it is written (``table``), and charts (``pictures``; ``charts`` and ``plan_charts`` draw
them). A terminal (``terminal``), a page (``page`` and ``templates``), JSON and data frames are made
of that alone.

What several answers share is in ``units`` (numbers and quantities), ``names`` (techniques and
deployments), ``phrases`` (parts of sentences), ``evidence`` and ``caveats`` (what was measured, and
what may be slower) and ``suitability`` (engines and quality). May import every room but the
commands.
"""
