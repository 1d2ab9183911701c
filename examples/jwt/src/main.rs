//! Verifies JSON Web Tokens (RFC 7519) for callers in any language: `bindings/c/examples/jwt.c` calls it from a C
//! event loop.
//!
//! ```text
//! jwt serve NAME       replies with a token's claims as JSON, or fails: 1 malformed, 2 wrong signature, 3 expired,
//!                      4 not valid yet
//! jwt tokens COUNT     prints tokens in turn: HS256, ES256, HS256 with another secret, ES256 expired an hour ago,
//!                      HS256 valid in half an hour
//! ```
//!
//! The keys are published ones. The service has the signing keys too; a real one would have only the verifying keys.

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode};
use pelton::{Request, Service};
use serde_json::{Value, json};
use std::error::Error;
use std::time::{SystemTime, UNIX_EPOCH};

const SECRET: &[u8] = b"a secret of both sides, of 32 bytes";
const ANOTHER: &[u8] = b"another secret that nobody shares..";

/// The key of RFC 7515, appendix A.3: its point, and all of it as PKCS #8.
const X: &str = "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU";
const Y: &str = "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0";
const PRIVATE: &str = "308187020100301306072a8648ce3d020106082a8648ce3d030107046d306b0201010420\
    8e9b109e719098bf980487df1f5d77e9cb29606ebed2263b5f57c213df84f4b2a144034200\
    047fcdce2770f6c45d4183cbee6fdb4b7b580733357be9ef13bacf6e3c7bd15445\
    c7f144cd1bbd9b7e872cdfedb9eeb9f4b3695d6ea90b24ad8a4623288588e5ad";

const MALFORMED: u32 = 1;
const SIGNATURE: u32 = 2;
const EXPIRED: u32 = 3;
const EARLY: u32 = 4;

struct Keys {
    shared: DecodingKey,
    public: DecodingKey,
}

impl Keys {
    /// Returns the claims of a valid token, or the reason why it is invalid.
    fn verify(&self, token: &[u8]) -> Result<Vec<u8>, (u32, String)> {
        let malformed = |why: &dyn std::fmt::Display| (MALFORMED, why.to_string());
        let header = decode_header(token).map_err(|error| malformed(&error))?;
        // The token may choose the key; the key determines the algorithm.
        let key = match header.alg {
            Algorithm::HS256 => &self.shared,
            Algorithm::ES256 => &self.public,
            _ => return Err(malformed(&"wanted HS256 or ES256")),
        };
        let mut validation = Validation::new(header.alg);
        validation.leeway = 0;
        validation.validate_nbf = true;
        match decode::<Value>(token, key, &validation) {
            Ok(token) => Ok(token.claims.to_string().into_bytes()),
            Err(error) => Err(match error.kind() {
                ErrorKind::InvalidSignature => (SIGNATURE, "the signature is not its issuer's".to_owned()),
                ErrorKind::ExpiredSignature => (EXPIRED, "it has expired".to_owned()),
                ErrorKind::ImmatureSignature => (EARLY, "it is not valid yet".to_owned()),
                _ => malformed(&error),
            }),
        }
    }

    fn answer(&self, request: Request<'_>) {
        // A client that has gone needs no reply.
        let _ = match self.verify(&request) {
            Ok(claims) => request.reply(&claims),
            Err((code, why)) => request.fail(code, why.as_bytes()),
        };
    }
}

fn serve(name: &str) -> Result<(), Box<dyn Error>> {
    let keys = Keys { shared: DecodingKey::from_secret(SECRET), public: DecodingKey::from_ec_components(X, Y)? };
    let threads = std::thread::available_parallelism()?.get();
    Ok(Service::listen(name)?.run(threads, |request| keys.answer(request))?)
}

fn tokens(count: u64) -> Result<(), Box<dyn Error>> {
    let byte = |at: usize| u8::from_str_radix(&PRIVATE[at..at + 2], 16);
    let private = (0..PRIVATE.len()).step_by(2).map(byte).collect::<Result<Vec<u8>, _>>()?;
    let private = EncodingKey::from_ec_der(&private);
    let (shared, another) = (EncodingKey::from_secret(SECRET), EncodingKey::from_secret(ANOTHER));
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    for number in 0..count {
        let (algorithm, key, expires) = match number % 5 {
            0 => (Algorithm::HS256, &shared, now + 3600),
            1 => (Algorithm::ES256, &private, now + 3600),
            2 => (Algorithm::HS256, &another, now + 3600),
            3 => (Algorithm::ES256, &private, now - 3600),
            _ => (Algorithm::HS256, &shared, now + 3600),
        };
        let mut claims = json!({ "sub": format!("user {number}"), "exp": expires });
        if number % 5 == 4 {
            claims["nbf"] = json!(now + 1800);
        }
        println!("{}", encode(&Header::new(algorithm), &claims, key)?);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", name] => serve(name),
        ["tokens", count] => tokens(count.parse()?),
        _ => Err("usage: jwt serve NAME | jwt tokens COUNT".into()),
    }
}
