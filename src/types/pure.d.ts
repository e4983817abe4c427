// The only names beyond ECMAScript that the pure folders may use; read by tsconfig.core.json alone.

/** UTF-8 encoder of the Encoding standard. */
declare class TextEncoder {
  encode(input?: string): Uint8Array<ArrayBuffer>;
}

/** UTF-8 decoder of the Encoding standard. */
declare class TextDecoder {
  constructor(label?: string, options?: { readonly fatal?: boolean; readonly ignoreBOM?: boolean });
  decode(input?: Uint8Array, options?: { readonly stream?: boolean }): string;
}
