import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { exportJWK, generateKeyPair, type JWK, type JWTPayload, SignJWT } from 'jose';

/** What the tokens of {@link TokenIssuer} say if nothing else is asked for. */
export const ISSUER = { issuer: 'https://issuer.test', audience: 'baton' };

type SigningKey = Awaited<ReturnType<typeof generateKeyPair>>['privateKey'];

/** An issuer of tokens with a key set at an address of this machine, which a test can change and switch off. */
export class TokenIssuer implements AsyncDisposable {
  readonly #server = createServer((_request, response) => {
    this.asked += 1;
    if (this.answer === undefined) response.writeHead(200).end(JSON.stringify({ keys: this.published }));
    else response.writeHead(this.answer.status, this.answer.headers).end(this.answer.body);
  });
  readonly #keys = new Map<string, SigningKey>();
  /** Public keys as they are published. */
  published: JWK[] = [];
  /** How often the key set was asked for. */
  asked = 0;
  /** In place of the key set. */
  answer: { readonly status: number; readonly headers?: Record<string, string>; readonly body?: string } | undefined;

  static async start(): Promise<TokenIssuer> {
    const issuer = new TokenIssuer();
    await issuer.addKey('k1');
    await new Promise<void>((resolve) => issuer.#server.listen(0, '127.0.0.1', resolve));
    return issuer;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}/jwks.json`;
  }

  /** Makes a key and publishes it. */
  async addKey(kid: string): Promise<void> {
    const { publicKey, privateKey } = await generateKeyPair('ES256');
    this.#keys.set(kid, privateKey);
    this.published.push({ ...(await exportJWK(publicKey)), kid, alg: 'ES256', use: 'sig' });
  }

  /** A token for the next minute, signed with a key of this issuer. */
  sign(
    claims: Readonly<Record<string, unknown>> = {},
    header: { readonly kid?: string; readonly signedBy?: string } = {},
  ): Promise<string> {
    const { kid = 'k1', signedBy = kid } = header;
    const key = this.#keys.get(signedBy);
    if (key === undefined) throw new Error(`no key ${signedBy}`);
    const now = Math.floor(Date.now() / 1000);
    const payload: JWTPayload = {
      iss: ISSUER.issuer,
      aud: ISSUER.audience,
      sub: 'team-j',
      iat: now,
      exp: now + 60,
      ...claims,
    };
    return new SignJWT(payload).setProtectedHeader({ alg: 'ES256', kid }).sign(key);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((resolve) => this.#server.close(resolve));
  }
}

/** A token with any head, and a signature that is none. */
export function forged(head: object, claims: object, signature = ''): string {
  const part = (value: object) => Buffer.from(JSON.stringify(value)).toString('base64url');
  return `${part(head)}.${part(claims)}.${signature}`;
}
