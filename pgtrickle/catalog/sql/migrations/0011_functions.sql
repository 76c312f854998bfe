-- User-defined functions that queries over several databases call: they must be the same in all of them.

CREATE TABLE pgtrickle.pgt_foreign_functions (
    database text NOT NULL REFERENCES pgtrickle.pgt_databases (name) ON DELETE CASCADE ON UPDATE CASCADE,
    function text NOT NULL,
    definition text,
    problem text,
    PRIMARY KEY (database, function)
);
COMMENT ON TABLE pgtrickle.pgt_foreign_functions IS 'What registered databases said of functions '
                                                    'that queries call, when a stream table was created.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_functions.function IS 'Its name with schema and the types of its arguments.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_functions.definition IS 'A hash of its body and everything '
                                                                'else that decides what it '
                                                                'returns; NULL where there is none.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_functions.problem IS 'Why it cannot be called there.';
