;;;; The conformance driver in Common Lisp. ../README.md has the command line and the messages.

(defpackage #:driver (:use #:cl))
(in-package #:driver)

(defvar *timeout* 10 "Seconds.")

(defun message (i size)
  (let ((octets (pelton:make-octets size)))
    (dotimes (j size octets)
      (setf (aref octets j) (+ (char-code #\a) (mod (+ i j) 26))))))

(defun check (i size found)
  (unless (equalp found (message i size))
    (error "message ~d: found ~s, expected ~s" i found (message i size))))

(defun check-count (found count)
  (unless (eql found count)
    (error "found ~d, expected ~d" found count)))

(defun send (name count size)
  (pelton:with-sender (sender name :timeout *timeout*)          ; waits for a receiver to listen
    (dotimes (i count)
      (pelton:send sender (message i size) :timeout *timeout*))
    (pelton:wait-released sender :timeout *timeout*)))                  ; until the receiver has released every message

(defun recv (name count size)
  (let ((received 0))
    (pelton:with-receiver (receiver name :accept t :timeout *timeout*)
      (pelton:do-messages (octets receiver :timeout *timeout*)  ; until the sender has closed
        (check received size octets)
        (incf received)))
    (check-count received count)))

(defun gather (name count size)
  (pelton:with-gathering-receiver (receiver name)
    (dotimes (i count)
      (let ((octets (pelton:receive receiver :timeout *timeout*)))   ; of all senders, round-robin
        (write-line (map 'string #'code-char (subseq octets 0 (min size (length octets)))))
        (finish-output)))))

(defun call (name count size)
  (pelton:with-client (client name :timeout *timeout*)
    (dotimes (i count)
      (check i size (pelton:call client (message i size) :timeout *timeout*)))))

(defun serve (name count size)
  (declare (ignore size))
  (let ((served 0))
    (pelton:with-service (service name)
      (sb-ext:with-timeout *timeout*
        (pelton:serve service (lambda (request)
                                ;; Draining replies to what was taken, this request included; then SERVE returns.
                                (when (eql (incf served) count)
                                  (pelton:drain service))
                                (pelton:request-octets request)))))
    (check-count served count)))

(defun run (verb &rest arguments)
  "The exit code."
  (destructuring-bind (&optional command unit) (rest (assoc verb '(("send" send "messages") ("recv" recv "messages")
                                                                   ("call" call "calls") ("serve" serve "calls")
                                                                   ("gather" gather "messages"))
                                                            :test #'equal))
    (cond ((null command)
           (format t "unsupported ~a: this driver does not have it~%" verb)
           3)
          ((/= 3 (length arguments))
           (format *error-output* "usage: driver ~a NAME COUNT SIZE~%" verb)
           2)
          (t
           (destructuring-bind (name count size) arguments
             (funcall command name (parse-integer count) (parse-integer size))
             (format t "ok ~a ~a ~a~%" verb count unit)
             0)))))

(defun main ()
  (setf *timeout* (parse-integer (or (sb-ext:posix-getenv "PELTON_SECONDS") "10")))
  (sb-ext:exit :code (handler-case (apply #'run (or (rest sb-ext:*posix-argv*) '("")))
                       (serious-condition (condition)
                         (format *error-output* "~a~%" condition)
                         1))))
