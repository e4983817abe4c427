import type { Dispatcher } from 'undici';
import { memberOf, textOf } from './json.ts';
import { messageOf } from './send.ts';

const MODELS_TIMEOUT_MS = 30_000;

/** How an endpoint is reached. */
export interface Endpoint {
  /** Without a slash at its end. */
  readonly baseUrl: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly dispatcher: Dispatcher;
}

/** The name to ask for: `wanted`, or the first of those that are served. Throws a sentence for the user. */
export async function findModel(endpoint: Endpoint, wanted: string | undefined, signal: AbortSignal): Promise<string> {
  const { baseUrl, headers, dispatcher } = endpoint;
  let served: readonly string[] | string;
  try {
    const timeout = AbortSignal.timeout(MODELS_TIMEOUT_MS);
    const { origin, pathname } = new URL(`${baseUrl}/v1/models`);
    const reply = await dispatcher.request({
      origin,
      path: pathname,
      method: 'GET',
      headers,
      signal: AbortSignal.any([signal, timeout]),
    });
    const text = await reply.body.text();
    served = reply.statusCode === 200 ? modelsOf(text) : `${baseUrl}/v1/models answers with status ${reply.statusCode}`;
  } catch (error) {
    throw new Error(`no endpoint answers at ${baseUrl}: ${messageOf(error)}`, { cause: error });
  }
  if (typeof served === 'string') {
    // An endpoint may have no list; the first request shows whether it has the model.
    if (wanted !== undefined) return wanted;
    throw new Error(`${served}: name the model with --model`);
  }
  if (wanted !== undefined && !served.includes(wanted)) {
    throw new Error(`${baseUrl} serves no model ${wanted} (--model), only ${served.join(', ') || 'none'}`);
  }
  const name = wanted ?? served[0];
  if (name === undefined) throw new Error(`${baseUrl} serves no model`);
  return name;
}

function modelsOf(text: string): readonly string[] | string {
  let data: unknown;
  try {
    data = memberOf(JSON.parse(text), 'data');
  } catch {
    return 'the list of models is no JSON';
  }
  return Array.isArray(data)
    ? data.map((model) => textOf(model, 'id')).filter((id) => id !== undefined)
    : 'no list of models';
}
