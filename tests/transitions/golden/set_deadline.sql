-- set_deadline
UPDATE job SET deadline_at = $2 WHERE id = $1
