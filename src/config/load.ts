import { readFileSync } from 'node:fs';
import { envLayer } from './flags.ts';
import { type LoadInput, type LoadResult, loadConfig } from './load-config.ts';

/** Loads the settings, with the file that `--config` or BATON_CONFIG names, if there is one. */
export function loadConfigFile(input: Omit<LoadInput, 'fileText' | 'fileName'>): LoadResult {
  const byFlag = input.flags['config'];
  const file = byFlag ?? envLayer(input.env).layer.values['config'];
  if (typeof file !== 'string') return loadConfig(input);
  const text = readText(file);
  if (text.kind === 'ok') return loadConfig({ ...input, fileText: text.text, fileName: file });
  return {
    kind: 'error',
    problems: [{ where: byFlag === undefined ? 'BATON_CONFIG' : '--config', message: text.message }],
  };
}

/** Reads a text file, or says in a sentence why it cannot be read. */
export function readText(
  file: string,
): { readonly kind: 'ok'; readonly text: string } | { readonly kind: 'bad'; readonly message: string } {
  try {
    return { kind: 'ok', text: readFileSync(file, 'utf8') };
  } catch (error) {
    const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
    const why =
      code === 'ENOENT' ? 'does not exist' : code === 'EISDIR' ? 'is a directory' : `cannot be read (${code})`;
    return { kind: 'bad', message: `${file} ${why}` };
  }
}
