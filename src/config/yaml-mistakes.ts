import type { ErrorCode } from 'yaml';

const MARK = 'an anchor (&), an alias (*) or a tag (!) stands here that means nothing; put a text with one into quotes';
const SHAPE = 'no value in YAML looks like this; put a text with special characters into quotes';

/** What to write instead, for each mistake that the YAML library finds. */
export const YAML_MISTAKES: Readonly<Record<ErrorCode, string>> = {
  ALIAS_PROPS: MARK,
  BAD_ALIAS: MARK,
  BAD_COLLECTION_TYPE: MARK,
  BAD_DIRECTIVE: 'a line that begins with % is an order to a YAML reader; leave it out',
  BAD_DQ_ESCAPE: 'an unknown escape in double quotes; write \\\\ for a backslash, or use single quotes',
  BAD_INDENT: 'indented in another way than the lines around it; give each level the same number of spaces',
  BAD_PROP_ORDER: MARK,
  BAD_SCALAR_START: 'a text cannot begin with this character; put it into quotes',
  BLOCK_AS_IMPLICIT_KEY: 'a second ": " on one line; begin a new line, or put the text into quotes',
  BLOCK_IN_FLOW: SHAPE,
  DUPLICATE_KEY: 'this key stands here a second time; leave one of the two out',
  IMPOSSIBLE: SHAPE,
  KEY_OVER_1024_CHARS: 'a key of more than 1024 characters',
  MISSING_CHAR: 'something is missing: a closing quote or bracket, a comma, or the ": " behind a key',
  MULTILINE_IMPLICIT_KEY: 'a key must stand on one line, with ": " behind it',
  MULTIPLE_ANCHORS: MARK,
  MULTIPLE_DOCS: 'a second document begins here ("---"); a file is one document',
  MULTIPLE_TAGS: MARK,
  NON_STRING_KEY: SHAPE,
  RESOURCE_EXHAUSTION: 'nested more deeply than any setting is',
  TAB_AS_INDENT: 'a tab; indent with spaces',
  TAG_RESOLVE_FAILED: MARK,
  UNEXPECTED_TOKEN: SHAPE,
};
