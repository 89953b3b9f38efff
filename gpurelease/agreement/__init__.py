"""How the ranks decide: every rank says where it stands and what it wants, and all of them read one verdict.

``rollcall`` carries answers and verdicts over WORLD's store, ``hall`` has the ranks of a new WORLD find each other
there, ``meanwhile`` is what they tell each other between two roll calls, and ``verdicts`` makes a verdict of all
answers.
"""
