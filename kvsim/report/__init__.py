"""What people and programs read: rows, tables and pages made from results.

May import every room but the commands.
"""
