/** A request to paste into another shell; `address` is where the facade listens, with or without `http://`. */
export function simHint(address: string): string {
  const url = (/^https?:\/\//.test(address) ? address : `http://${address}`)
    .replace('//0.0.0.0:', '//127.0.0.1:')
    .replace('//[::]:', '//[::1]:')
    .replace(/\/$/, '');
  return [
    'Simulated engines are running. Try:',
    '',
    `  curl ${url}/v1/chat/completions -H 'content-type: application/json' \\`,
    `    -d '{"model": "sim-model", "messages": [{"role": "user", "content": "Hello"}]}'`,
    '',
    '',
  ].join('\n');
}
