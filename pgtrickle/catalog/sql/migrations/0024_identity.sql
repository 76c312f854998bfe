-- The identity of this database, so that a copy of it can be detected.
CREATE TABLE pgtrickle.pgt_identity (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    node text NOT NULL,
    database name NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE pgtrickle.pgt_identity IS 'One row: the system identifier and OID of the '
                                           'database that this catalog was last used in.';
INSERT INTO pgtrickle.pgt_identity (node, database)
SELECT c.system_identifier || '/' || d.oid, d.datname FROM pg_control_system() AS c
JOIN pg_database AS d ON d.datname = current_database();
