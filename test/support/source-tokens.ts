/** A word, number, string or punctuation mark of a source text; comments and white space are left out. */
export interface Token {
  readonly kind: 'word' | 'string' | 'mark';
  /** A string's contents as written between its quotes, else the text itself. */
  readonly text: string;
  readonly line: number;
}

/** An import, a re-export or a dynamic import of a source text. */
export interface ImportLine {
  readonly specifier: string;
  /** True for `import type` and `export type`: erased when the file runs. */
  readonly typeOnly: boolean;
  readonly line: number;
}

const WORD = /[\p{ID_Start}\p{Nd}$_#@][\p{ID_Continue}$\u200c\u200d]*/uy;
const BLANK = /\s+|\/\/[^\n]*|\/\*.*?\*\//sy;
const STRING = /'((?:[^'\\\n]|\\.)*)'|"((?:[^"\\\n]|\\.)*)"/sy;
const REGEX = /\/(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[a-z]*/y;
const TEMPLATE_CHUNK = /(?:[^`\\$]|\\.|\$(?!\{))*/sy;
/** Words after which a slash begins a regular expression; after any other word it divides. */
const BEFORE_REGEX = new Set([
  'return',
  'typeof',
  'case',
  'in',
  'of',
  'void',
  'delete',
  'do',
  'else',
  'yield',
  'await',
]);

/** Splits TypeScript source into tokens; templates become their contents as strings plus the tokens of each `${}`. */
export function tokensOf(source: string): readonly Token[] {
  const tokens: Token[] = [];
  // For each open template, how many braces are open inside its current `${}`.
  const templates: number[] = [];
  let at = 0;
  let line = 1;

  const match = (pattern: RegExp): RegExpExecArray | undefined => {
    pattern.lastIndex = at;
    return pattern.exec(source) ?? undefined;
  };
  const advance = (text: string): void => {
    at += text.length;
    for (const character of text) if (character === '\n') line += 1;
  };
  const push = (kind: Token['kind'], text: string, raw: string): void => {
    tokens.push({ kind, text, line });
    advance(raw);
  };
  const templateChunk = (): void => {
    const chunk = match(TEMPLATE_CHUNK)?.[0] ?? '';
    push('string', chunk, chunk);
    if (source.startsWith('${', at)) {
      advance('${');
      templates.push(0);
    } else {
      advance('`');
    }
  };
  const regexMayStart = (): boolean => {
    const last = tokens.at(-1);
    if (last === undefined) return true;
    if (last.kind === 'word') return BEFORE_REGEX.has(last.text);
    return last.kind === 'mark' && last.text !== ')' && last.text !== ']' && last.text !== '}';
  };

  while (at < source.length) {
    const blank = match(BLANK);
    if (blank !== undefined) {
      advance(blank[0]);
      continue;
    }
    const word = match(WORD);
    if (word !== undefined) {
      push('word', word[0], word[0]);
      continue;
    }
    const quoted = match(STRING);
    if (quoted !== undefined) {
      push('string', quoted[1] ?? quoted[2] ?? '', quoted[0]);
      continue;
    }
    const character = source.charAt(at);
    const regex = character === '/' && regexMayStart() ? match(REGEX) : undefined;
    if (regex !== undefined) {
      push('string', regex[0], regex[0]);
      continue;
    }
    const open = templates.at(-1);
    if (character === '`') {
      advance(character);
      templateChunk();
    } else if (character === '}' && open === 0) {
      advance(character);
      templates.pop();
      templateChunk();
    } else {
      if (open !== undefined && character === '{') templates[templates.length - 1] = open + 1;
      if (open !== undefined && character === '}') templates[templates.length - 1] = open - 1;
      push('mark', character, character);
    }
  }
  return tokens;
}

/** Lists what a source text imports; a dynamic import of something other than a literal has the specifier `?`. */
export function importsOf(tokens: readonly Token[]): readonly ImportLine[] {
  const found: ImportLine[] = [];
  for (const [index, token] of tokens.entries()) {
    if (token.kind !== 'word' || tokens[index - 1]?.text === '.') continue;
    const next = tokens[index + 1];
    if (token.text === 'import' && next?.text === '(') {
      const argument = tokens[index + 2];
      found.push({ specifier: argument?.kind === 'string' ? argument.text : '?', typeOnly: false, line: token.line });
    } else if (token.text === 'import' && next?.kind === 'string') {
      found.push({ specifier: next.text, typeOnly: false, line: token.line });
    } else if (token.text === 'import' || token.text === 'export') {
      const specifier = fromClause(tokens, index + 1);
      // `import type from './x.ts'` binds a value that happens to be called type.
      const typeOnly = next?.text === 'type' && tokens[index + 2]?.text !== 'from';
      if (specifier !== undefined) found.push({ specifier, typeOnly, line: token.line });
    }
  }
  return found;
}

/** Finds the specifier of the import or re-export clause that starts at a token. */
function fromClause(tokens: readonly Token[], start: number): string | undefined {
  for (let index = start; index < tokens.length; index += 1) {
    const token = tokens[index];
    const next = tokens[index + 1];
    if (token?.text === 'from' && token.kind === 'word' && next?.kind === 'string') return next.text;
    // The clause holds names, braces, commas and a star, nothing else.
    if (token === undefined || token.kind === 'string') return undefined;
    if (token.kind === 'mark' && !'{},*'.includes(token.text)) return undefined;
    if (index > start && (token.text === 'import' || token.text === 'export')) return undefined;
  }
  return undefined;
}
