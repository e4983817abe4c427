import { request } from 'node:http';

/** Milliseconds from a request to the first piece of its streamed reply, as its client sees it; rejects unless it is served. */
export function firstContent(
  url: string,
  body: string,
  headers: Readonly<Record<string, string>> = {},
): Promise<number> {
  const startedAt = performance.now();
  return new Promise((resolve, reject) => {
    let at = 0;
    const call = request(`${url}/v1/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body), ...headers },
    });
    call.on('response', (response) => {
      response.on('data', () => {
        at ||= performance.now() - startedAt;
      });
      response.on('end', () => (response.statusCode === 200 ? resolve(at) : reject(new Error('refused'))));
    });
    call.on('error', reject);
    call.end(body);
  });
}
