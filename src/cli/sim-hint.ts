/**
 * A request to paste into another shell; `address` is where the facade listens, with or without `http://`. With TLS the
 * shell may not know the authority of the certificate, so curl does not ask for it.
 */
export function simHint(address: string, tls = false): string {
  const url = `${tls ? 'https' : 'http'}://${address.replace(/^https?:\/\//, '')}`
    .replace('//0.0.0.0:', '//127.0.0.1:')
    .replace('//[::]:', '//[::1]:')
    .replace(/\/$/, '');
  return [
    'Simulated engines are running. Try:',
    '',
    `  curl ${tls ? '-k ' : ''}${url}/v1/chat/completions -H 'content-type: application/json' \\`,
    `    -d '{"model": "sim-model", "messages": [{"role": "user", "content": "Hello"}]}'`,
    '',
    '',
  ].join('\n');
}
