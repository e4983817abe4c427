import { readFileSync } from 'node:fs';
import { type ApiKeysResult, parseApiKeys, parseRpcTokens, type RpcTokensResult } from '../core/tenant.ts';
import { envLayer } from './flag-layers.ts';
import { type LoadInput, type LoadResult, loadConfig } from './load-config.ts';
import { whyUnread } from './unread.ts';

/** What settings are made from, before a file is read. */
type FreeInput = Omit<LoadInput, 'fileText' | 'fileName'>;

/**
 * Loads the settings, with the file that `--config` or BATON_CONFIG names, if there is one. The files of clients' keys and
 * of tokens are checked with them.
 */
export function loadConfigFile(input: FreeInput): LoadResult {
  const loaded = loadWithFile(input);
  if (loaded.kind === 'error') return loaded;
  const { roles, auth, rpc } = loaded.config;
  const read = [
    ...(roles.includes('facade') && auth.apiKeysFile !== undefined ? [loadApiKeys(auth.apiKeysFile)] : []),
    ...(rpc.tokensFile === undefined ? [] : [loadRpcTokens(rpc.tokensFile)]),
  ];
  const problems = read.flatMap((result) => (result.kind === 'error' ? result.problems : []));
  return problems.length > 0 ? { kind: 'error', problems } : loaded;
}

/** Reads the file of clients' keys; mistakes name the file and the line. */
function loadApiKeys(file: string): ApiKeysResult {
  const text = readText(file);
  if (text.kind === 'ok') return parseApiKeys(text.text, file);
  return { kind: 'error', problems: [{ where: 'auth.api_keys_file (--api-keys-file)', message: text.message }] };
}

/** Reads the file of tokens; mistakes name the file and the line. */
function loadRpcTokens(file: string): RpcTokensResult {
  const text = readText(file);
  if (text.kind === 'ok') return parseRpcTokens(text.text, file);
  return { kind: 'error', problems: [{ where: 'rpc.tokens_file (--rpc-tokens-file)', message: text.message }] };
}

/** The file that `--config` or BATON_CONFIG names. */
export function configFile({ flags, env }: FreeInput): string | undefined {
  const file = flags['config'] ?? envLayer(env).layer.values['config'];
  return typeof file === 'string' ? file : undefined;
}

function loadWithFile(input: FreeInput): LoadResult {
  const byFlag = input.flags['config'];
  const file = configFile(input);
  if (file === undefined) return loadConfig(input);
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
    return { kind: 'bad', message: `${file} ${whyUnread(error)}` };
  }
}
