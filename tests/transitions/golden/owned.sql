-- owned
SELECT t.id, t.epoch FROM task t WHERE t.status = 'running' AND t.lease_owner = $1
