const LEXEMES = /[ \t\n\r]*("(?:[^"\\]|\\.)*"|[[\]{}:,]|[^ \t\n\r"[\]{}:,]+|")/gsy;

/**
 * `JSON.parse` for objects whose keys are tokens of a vocabulary, such as `top_logprobs`. V8 14.6 (Node 26) can read
 * an escaped key as `\` where an object before it had the same first keys and then the key `\`: `{"a":0,"\"":0}` comes
 * back as `{"a":0,"\\":0}`. Text with escapes is therefore put together here, from strings and numbers that `JSON.parse` reads
 * one at a time. Throws SyntaxError as `JSON.parse` does.
 */
export function parseJson(text: string): unknown {
  if (!text.includes('\\')) return JSON.parse(text);
  const lexemes = Array.from(text.matchAll(LEXEMES), (match) => match[1] ?? '');
  let next = 0;

  function take(expected: string): void {
    if (lexemes[next++] !== expected) throw new SyntaxError(`expected ${expected} in JSON`);
  }

  function list<T>(close: string, element: () => T): T[] {
    const elements: T[] = [];
    next += 1;
    while (lexemes[next] !== close) {
      if (elements.length > 0) take(',');
      elements.push(element());
    }
    next += 1;
    return elements;
  }

  function member(): [string, unknown] {
    const key: unknown = JSON.parse(lexemes[next++] ?? '');
    if (typeof key !== 'string') throw new SyntaxError('expected a string as key in JSON');
    take(':');
    return [key, value()];
  }

  function value(): unknown {
    const lexeme = lexemes[next] ?? '';
    if (lexeme === '{') return Object.fromEntries(list('}', member));
    if (lexeme === '[') return list(']', value);
    next += 1;
    return JSON.parse(lexeme);
  }

  const parsed = value();
  if (next !== lexemes.length || lexemes.length === 0) throw new SyntaxError('unexpected text after JSON');
  return parsed;
}
