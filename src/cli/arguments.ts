import { FLAGS, type FlagSpec } from '../config/flags.ts';

/** A command line in which no list flag occurs twice where the later one replaces, or the sentence that refuses it. */
export type TidyResult =
  | { readonly kind: 'ok'; readonly args: readonly string[] }
  | { readonly kind: 'bad'; readonly message: string };

/**
 * Drops every but the last occurrence of a list flag that replaces (commander would add them up), and refuses a flag
 * whose value is missing because another flag follows (commander would take that flag as the value).
 */
export function tidyArguments(args: readonly string[]): TidyResult {
  const groups: { readonly flag: FlagSpec | undefined; readonly words: string[] }[] = [];
  let literal = false;
  for (const word of args) {
    literal ||= word === '--';
    const last = groups.at(-1);
    if (!literal && word.startsWith('--'))
      groups.push({ flag: findFlag(word.split('=', 1)[0] ?? word), words: [word] });
    else if (last === undefined) groups.push({ flag: undefined, words: [word] });
    else last.words.push(word);
  }
  for (const { flag, words } of groups) {
    const [name = ''] = words;
    if (
      flag !== undefined &&
      flag.kind !== 'switch' &&
      (words.length === 1 ? !name.includes('=') : words[1] === '--')
    ) {
      return { kind: 'bad', message: `${name} needs a value, ${name} <${flag.value ?? 'value'}>` };
    }
  }
  const kept = groups.filter(
    ({ flag }, i) => flag?.kind !== 'list-replace' || !groups.slice(i + 1).some((later) => later.flag === flag),
  );
  return { kind: 'ok', args: kept.flatMap(({ words }) => words) };
}

/** Finds a flag by either of its spellings. */
function findFlag(word: string): FlagSpec | undefined {
  return FLAGS.find((flag) => word === `--${flag.name}` || (flag.alias !== undefined && word === `--${flag.alias}`));
}
