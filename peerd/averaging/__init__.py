"""All-reduce within a stage: rounds over a roster, the codecs of their traffic, and the averages kept for mates that missed them."""
