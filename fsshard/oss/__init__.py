"""How do ZeRO-1 and ZeRO-2 work on native torch? Who updates which parameter, and what ranks send each other."""
