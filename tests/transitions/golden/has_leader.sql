-- has_leader
SELECT EXISTS (
    SELECT 1 FROM leadership l
    WHERE l.role = $1 AND l.until >= clock_timestamp()
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = l.owner AND w.draining)
)
