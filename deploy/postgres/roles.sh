#!/bin/sh
# Makes the database and its two roles; the PostgreSQL image runs it once, when it makes the data.
#   leasehold_owner  owns the schema: `leasehold migrate` alone connects as it
#   leasehold_app    reads and writes rows: what the API and the workers connect as; `leasehold migrate` grants it that.
#                    From PostgreSQL 16 it also sees what the sessions of other roles do (pg_read_all_stats)
# On a server of your own: POSTGRES_USER=postgres DATABASE_OWNER_PASSWORD=... DATABASE_APP_PASSWORD=... sh roles.sh
set -eu
: "${DATABASE_OWNER_PASSWORD:?}" "${DATABASE_APP_PASSWORD:?}"
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\getenv owner_password DATABASE_OWNER_PASSWORD
\getenv app_password DATABASE_APP_PASSWORD
CREATE ROLE leasehold_owner LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'owner_password';
CREATE ROLE leasehold_app LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT PASSWORD :'app_password';
CREATE DATABASE leasehold OWNER leasehold_owner;
-- Nobody else connects, and leasehold_app makes no temporary tables.
REVOKE ALL ON DATABASE leasehold FROM PUBLIC;
GRANT CONNECT ON DATABASE leasehold TO leasehold_app;
\connect leasehold
REVOKE ALL ON SCHEMA public FROM PUBLIC;
ALTER SCHEMA public OWNER TO leasehold_owner;
-- So that metrics, console and `leasehold doctor` tell whose transaction or standby is in the way. Some services do not let
-- their administrator grant it: then these stay silent about that, and all else works.
SELECT current_setting('server_version_num')::int >= 160000 AS grants_inherit \gset
\set ON_ERROR_STOP 0
\if :grants_inherit
GRANT pg_read_all_stats TO leasehold_app WITH INHERIT TRUE;
\endif
SQL
