"""Programs: trace once, decide once, then plain local ops and collectives.

Read in this order: `ir` (the graph), `trace` (function -> graph), `partition` (graph -> decisions),
`emit` (decisions -> instructions of one rank), `codegen` (instructions -> straight-line Python),
`program` (all of it for one signature).
"""
