;;;; Calls.

(in-package #:pelton-tests)

(defmacro with-serving ((name handler &rest options) &body body)
  "Runs BODY while a thread serves NAME, then stops the service."
  (let ((service (gensym)) (thread (gensym)))
    `(pelton:with-service (,service ,name)
       (let ((,thread (in-thread (pelton:serve ,service ,handler ,@options))))
         (unwind-protect (progn ,@body)
           (pelton:stop ,service)
           (joined ,thread))))))

(defun service-name (name)
  (format nil "unix:~a" (in-directory name)))

(deftest calls-are-replied-to-failed-and-abandoned
  (with-serving ((service-name "s") (lambda (request)
                                      (let ((words (text (pelton:request-octets request))))
                                        (cond ((string= words "fail") (pelton:fail request 7 (bytes "on purpose")))
                                              ((string= words "error") (error "broken"))
                                              ((string= words "nothing") nil)
                                              ((string= words "parts")
                                               (dotimes (i 3) (pelton:reply-part request (bytes (princ-to-string i))))
                                               (pelton:reply request (bytes "3")))
                                              (t (bytes (reverse words))))))
                 :threads 3)
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (is (equal (text (pelton:call client (bytes "abc") :timeout *limit*)) "cba"))
      (pelton:with-call ((sap size) client (bytes "xyz") :timeout *limit*)
        (is (equal (text (pelton:sap-octets sap size)) "zyx")))
      (let ((condition (signals pelton:call-failed (pelton:call client (bytes "fail") :timeout *limit*))))
        (is (eql (pelton:call-failed-code condition) 7))
        (is (equal (text (pelton:call-failed-octets condition)) "on purpose")))
      (let ((condition (signals pelton:call-failed (pelton:call client (bytes "error") :timeout *limit*))))
        (is (search "broken" (princ-to-string condition))))
      (signals pelton:call-abandoned (pelton:call client (bytes "nothing") :timeout *limit*))
      (is (equal (text (pelton:call client (bytes "parts") :timeout *limit*)) "0123"))
      ;; Larger than a lane.
      (let ((large (make-octets 10000000)))
        (fill large 65)
        (is (equalp (pelton:call client large :timeout *limit*) large)))
      (is (eql 0 (getf (pelton:info client) :in-flight))))))

(deftest a-request-has-the-process-and-user-of-its-client
  (with-serving ((service-name "s") (lambda (request)
                                      (bytes (format nil "~d ~d" (pelton:request-pid request)
                                                     (pelton:request-uid request)))))
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (is (equal (text (pelton:call client (bytes "x") :timeout *limit*))
                 (format nil "~d ~d" (sb-posix:getpid) (sb-posix:geteuid)))))))

(deftest a-request-has-the-traceparent-that-its-client-gave-it
  (with-serving ((service-name "s") (lambda (request)
                                      (bytes (princ-to-string (pelton:request-traceparent request)))))
    (pelton:with-client (client (service-name "s") :timeout *limit* :capacity 65536)
      (is (equal (text (pelton:call client (bytes "x") :timeout *limit* :traceparent (traceparent 1))) (traceparent 1)))
      (is (equal (text (pelton:call client (bytes "x") :timeout *limit*)) "NIL"))
      (is (equal (text (pelton:call client (bytes "x") :timeout *limit* :traceparent "not one")) "NIL"))
      (pelton:with-call ((sap size) client (bytes "x") :timeout *limit* :traceparent (traceparent 2))
        (is (equal (text (pelton:sap-octets sap size)) (traceparent 2))))
      ;; Larger than the lane, with and without a deadline.
      (let ((large (make-octets 1000000)))
        (is (equal (text (pelton:call client large :timeout *limit* :traceparent (traceparent 3))) (traceparent 3)))
        (is (equal (text (pelton:call client large :traceparent (traceparent 4))) (traceparent 4))))
      (let ((calls (loop for i from 1 to 1000
                         collect (pelton:submit client (make-octets 1000) :timeout *limit*
                                                                          :traceparent (traceparent i)))))
        (is (equal (loop for call in calls collect (text (pelton:await client :call call :timeout *limit*)))
                   (loop for i from 1 to 1000 collect (traceparent i))))))))

(deftest a-drained-service-replies-to-received-requests-and-returns-later-ones
  (let ((taken (sb-thread:make-semaphore)) (go-on (sb-thread:make-semaphore)) (handled '()))
    (pelton:with-service (service (service-name "s"))
      (let ((thread (in-thread (pelton:serve service (lambda (request)
                                                       (push (text (pelton:request-octets request)) handled)
                                                       (sb-thread:signal-semaphore taken)
                                                       (sb-thread:wait-on-semaphore go-on :timeout *limit*)
                                                       (bytes "done"))))))
        (pelton:with-client (client (service-name "s") :timeout *limit*)
          (let ((call (pelton:submit client (bytes "taken") :timeout *limit* :idempotent t)))
            (is (sb-thread:wait-on-semaphore taken :timeout *limit*))
            (pelton:drain service)
            (let ((late (pelton:submit client (bytes "late") :timeout *limit*)))
              (sb-thread:signal-semaphore go-on)
              (is (equal (text (pelton:await client :call call :timeout *limit*)) "done"))
              (joined thread)
              (signals pelton:pelton-error (pelton:await client :call late :timeout *limit*)))))
        (is (equal handled '("taken")))))))

(deftest many-calls-are-in-flight-and-awaited-in-any-order
  (with-serving ((service-name "s") #'pelton:request-octets :threads 2)
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (let ((calls (loop for i below 200 collect (pelton:submit client (number-octets i) :timeout *limit*))))
        (is (equalp (pelton:await client :call (nth 100 calls) :timeout *limit*) (number-octets 100)))
        (let ((left (make-hash-table)))
          (loop for call in calls for i from 0 unless (eql i 100) do (setf (gethash call left) i))
          (dotimes (i 199)
            (multiple-value-bind (octets outcome call) (pelton:await client :timeout *limit*)
              (is (eq outcome :reply))
              (is (equalp octets (number-octets (gethash call left))))
              (remhash call left)))
          (is (eql 0 (hash-table-count left))))
        (signals pelton:refused-error (pelton:await client :call (first calls) :timeout *limit*))))))

(deftest a-call-that-times-out-is-cancelled
  (let ((go-on (sb-thread:make-semaphore)) (cancelled nil))
    (with-serving ((service-name "s") (lambda (request)
                                        (when (equalp (pelton:request-octets request) (bytes "slow"))
                                          (sb-thread:wait-on-semaphore go-on :timeout *limit*)
                                          (setf cancelled (pelton:request-cancelled-p request)))
                                        (bytes "done"))
                   :threads 2)
      (pelton:with-client (client (service-name "s") :timeout *limit*)
        (signals pelton:timed-out (pelton:call client (bytes "slow") :timeout 0.05))
        ;; The second call comes after the cancellation, so the service has both.
        (is (equal (text (pelton:call client (bytes "quick") :timeout *limit*)) "done"))
        (sb-thread:signal-semaphore go-on)
        (until cancelled)))))

(deftest the-end-of-a-service-is-signalled-at-its-clients
  (let ((name (service-name "s")) (signalled 0))
    (let* ((service (pelton:open-service name))
           (thread (in-thread (pelton:serve service (lambda (request) (declare (ignore request)) (incf signalled)
                                                            (bytes "y"))))))
      (pelton:with-client (client name :timeout *limit*)
        (is (pelton:notify client (bytes "x") :timeout *limit*))
        (is (equal (text (pelton:call client (bytes "x") :timeout *limit*)) "y"))
        (is (eql signalled 2))
        (pelton:stop service)
        (joined thread)
        (pelton:close-handle service)
        (signals pelton:channel-ended (pelton:call client (bytes "x") :timeout *limit*))))
    (signals pelton:no-listener-error (pelton:open-client name))))

(deftest serve-can-be-interrupted-and-called-again
  (pelton:with-service (service (service-name "s"))
    (dolist (threads '(1 3))
      (dotimes (i 2)
        (signals sb-ext:timeout (sb-ext:with-timeout 0.05 (pelton:serve service #'pelton:request-octets
                                                                        :threads threads))))
      (let ((thread (in-thread (handler-case (pelton:serve service #'pelton:request-octets :threads threads)
                                 (broken () :broken)))))
        (pelton:with-client (client (service-name "s") :timeout *limit*)
          (dotimes (i 5) (is (equalp (pelton:call client (number-octets i) :timeout *limit*) (number-octets i)))))
        (sb-thread:interrupt-thread thread (lambda () (signal 'broken)))
        (is (eq (joined thread) :broken))))))

(define-condition broken (serious-condition) ())

(deftest a-serious-condition-in-a-handler-of-any-thread-is-signalled-by-serve
  (pelton:with-service (service (service-name "s"))
    (dolist (threads '(1 3))
      (let ((thread (in-thread (handler-case (pelton:serve service (lambda (request) (declare (ignore request))
                                                                           (error 'broken))
                                                           :threads threads)
                                 (broken () :broken)))))
        (pelton:with-client (client (service-name "s") :timeout *limit*)
          (signals pelton:call-abandoned (pelton:call client (bytes "x") :timeout *limit*)))
        (is (eq (joined thread) :broken))))))

(define-condition unprintable (error) () (:report (lambda (condition stream) (declare (ignore condition stream))
                                                          (error "not even this"))))

(deftest every-error-in-a-handler-fails-the-call
  (with-serving ((service-name "s") (lambda (request)
                                      (if (equalp (pelton:request-octets request) (bytes "x"))
                                          (error 'unprintable)
                                          ;; Of a channel of the handler's own.
                                          (pelton:with-channel (sender receiver)
                                            (pelton:close-handle sender)
                                            (pelton:receive receiver)))))
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (signals pelton:call-failed (pelton:call client (bytes "x") :timeout *limit*))
      (signals pelton:call-failed (pelton:call client (bytes "y") :timeout *limit*)))))

(deftest interrupts-that-unwind-from-serve-leave-no-client-waiting
  (pelton:with-service (service (service-name "s"))
    (let* ((ended nil) (interrupts 0)
           (thread (in-thread (loop until ended
                                    do (catch 'out
                                         (let ((*inside* t))
                                           (pelton:serve service #'pelton:request-octets))))))
           (disturber (in-thread (disturb thread (lambda () ended)
                                          (lambda () (when *inside* (incf interrupts) (throw 'out nil)))))))
      (pelton:with-client (client (service-name "s") :timeout *limit*)
        (let ((answered 0))
          (loop until (and (>= interrupts 100) (>= answered 100))
                do (handler-case (progn (pelton:call client (bytes "x") :timeout *limit*) (incf answered))
                     (pelton:call-abandoned ())))
          (is (>= answered 100))))
      (setf ended t)
      (pelton:stop service)
      (joined disturber)
      (joined thread))))

(deftest a-reply-that-an-interrupt-kept-back-goes-to-the-next-await
  (with-serving ((service-name "s") #'pelton:request-octets)
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (let ((first (pelton:submit client (bytes "first"))) (second (pelton:submit client (bytes "second"))))
        (is (equal (text (pelton:await client :call second :timeout *limit*)) "second"))
        ;; It has come: one thread replies in order.
        (with-an-interrupt-pending (pelton:await client :call first :timeout *limit*))
        (is (eql 1 (length (pelton::client-undelivered client))))
        (multiple-value-bind (octets outcome call) (pelton:await client :timeout *limit*)
          (is (equal (list (text octets) outcome call) (list "first" :reply first))))
        (signals pelton:refused-error (pelton:await client :call first :timeout *limit*))))))

(deftest a-client-that-waits-for-space-takes-replies-meanwhile
  (with-serving ((service-name "s") #'pelton:request-octets)
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (let* ((large (make-octets 200000)) (calls (loop repeat 100 collect
                                                       (pelton:submit client large :timeout *limit*))))
        (dolist (call calls) (is (eql 200000 (length (pelton:await client :call call :timeout *limit*))))))
      ;; More small ones than the limit: in the end so many replies wait that waiting is without effect.
      (let ((asked 0))
        (signals pelton:refused-error (loop (pelton:submit client (bytes "x") :timeout *limit*) (incf asked)))
        (is (>= asked 1024))
        (is (pelton:notify client (bytes "x") :timeout *limit*))
        (dotimes (i asked) (pelton:await client :timeout *limit*))
        (is (pelton:call client (bytes "x") :timeout *limit*))))))

(deftest parts-of-a-reply-are-joined-or-dropped
  (is (eql 300000 (length (pelton::joined (loop repeat 300000 collect (make-octets 1))))))
  (with-serving ((service-name "s") (lambda (request)
                                      (dotimes (i 3) (pelton:reply-part request (bytes "part")))
                                      (bytes "end")))
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (is (equal "part" (pelton:with-call ((sap size) client (bytes "x") :timeout *limit*)
                                          (text (pelton:sap-octets sap size)))))
      (is (equal "partpartpartend" (text (pelton:call client (bytes "x") :timeout *limit*))))
      (signals pelton:timed-out (pelton:await client :timeout 0)))))

(deftest a-reply-in-parts-ends-after-its-last-part
  (with-serving ((service-name "s") (lambda (request)
                                      (dotimes (i (length (pelton:request-octets request)))
                                        (pelton:reply-part request (bytes (princ-to-string i))))
                                      (pelton:end-reply request)
                                      (signals pelton:null-error (pelton:end-reply request))
                                      (bytes "ignored")))
    (pelton:with-client (client (service-name "s") :timeout *limit*)
      (let ((call (pelton:submit client (bytes "xy") :timeout *limit*)))
        (is (equal (loop for (octets outcome) = (multiple-value-list (pelton:await client :call call :timeout *limit*))
                         collect (list (text octets) outcome)
                         while (eq outcome :part))
                   '(("0" :part) ("1" :part) ("" :end)))))
      ;; Without a part.
      (is (equal "" (text (pelton:call client (bytes "") :timeout *limit*)))))))
